"""ROSE, the engine: `step(batch) -> LazyTensor`, and the only part that knows torch."""
