"""Parts that need torch: the abort of process groups, CUDA devices, torch's stores."""
