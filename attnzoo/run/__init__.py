"""A run: its command line, its folder, stopping and resuming. Importing this package imports neither torch nor Lightning."""
