"""The model: loading it, telling its identity, and running it packed over the paged KV pool."""
