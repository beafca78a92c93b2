"""Hardware, clusters, compiled programs, files and progress: what knows nothing of federated learning."""
