"""A Slurm of four nodes, an Open MPI, and training jobs under them."""
