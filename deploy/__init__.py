"""Settings, Serve wiring and the command line.

Knows how the parts are put together and started; knows nothing of what is inside them.
"""
