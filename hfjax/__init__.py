# SPDX-License-Identifier: Apache-2.0
"""hfjax: HybridFlow for JAX."""
