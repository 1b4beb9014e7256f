"""The configurations of the recipes, checked without importing torch: a mistake is reported at once."""
