# SPDX-License-Identifier: Apache-2.0
"""Automatic device mapping (HybridFlow §6): a placement's cost, the best one, and its proof."""
