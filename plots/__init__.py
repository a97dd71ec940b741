"""Figures. They are drawn into files, so they need no backend of Matplotlib's but Agg, its default for files."""

import contextlib
import os

# Matplotlib reads MPLBACKEND as it is imported, and fails if that names a backend that is not there: a notebook's, in
# a program that the notebook starts. Where the backend does exist, the caller's own figures keep it.
backend = os.environ.pop("MPLBACKEND", None)
import matplotlib

if backend is not None:
    os.environ["MPLBACKEND"] = backend
    with contextlib.suppress(ValueError):
        matplotlib.rcParams["backend"] = backend
