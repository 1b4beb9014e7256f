"""Configurations for TorchRL's trainers: ``python train.py --config-name replay_dqn`` (or ``replay_sac``)."""
