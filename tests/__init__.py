"""The test suite; a package so that its modules can share the reference loop."""

import os

# PyTensor locks its folder of compiled C modules while the compiler runs, so that two worker
# processes would take turns for much of the suite's time. Each gets a folder of its own; the other
# caches they share. PyTensor reads this when it is imported, which is later than here.
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
FLAGS = os.environ.get("PYTENSOR_FLAGS", "")
if WORKER and "compiledir_format=" not in FLAGS:
    FOLDER = f"%(short_platform)s-%(processor)s-%(python_version)s-%(python_bitwidth)s-{WORKER}"
    os.environ["PYTENSOR_FLAGS"] = f"compiledir_format=compiledir_{FOLDER},{FLAGS}".strip(",")
