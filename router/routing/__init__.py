"""Which replica serves a request: the cost model, the view of load, and the Ray Serve adapter."""
