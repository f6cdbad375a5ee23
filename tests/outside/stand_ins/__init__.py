"""Files that stand in for data, hubs and devices; see :mod:`tests.outside.in_process.sitecustomize`."""
