"""Export: a converted model as a file, for lowbit itself or for other runtimes."""
