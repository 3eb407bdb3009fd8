"""What a user writes: jobs, sources, batches, mixtures, meshes and policies."""
