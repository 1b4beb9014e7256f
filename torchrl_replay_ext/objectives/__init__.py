"""Loss modules and a value estimator for TorchRL."""
