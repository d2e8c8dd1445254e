"""What ``doctor`` looks at: this machine (``machine.py``) and the model server (``engine.py``)."""
