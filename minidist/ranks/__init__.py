"""How ranks talk, start and fail: one Comm over MPI processes and over threads."""
