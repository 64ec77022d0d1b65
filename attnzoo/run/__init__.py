"""A run: its command line, its folder, how it is stopped and resumed. Importing this imports neither torch nor Lightning."""
