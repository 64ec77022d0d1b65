"""A research model zoo of attention variants. `import attnzoo.hub` gives transformers its attention functions and model types."""
