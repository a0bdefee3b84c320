"""Programs and functions that workers run."""
