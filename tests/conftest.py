# SPDX-License-Identifier: Apache-2.0
"""Eight CPU devices, strict dtypes and ranks, set before JAX starts."""

import atexit
import os
import shutil
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers and all runs keep their programs here
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="hfjax-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # programs here run once or twice: compiling them is what takes time
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

assert jax.device_count() == 8  # starts JAX: no test can change the number any more
