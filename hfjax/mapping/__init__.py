# SPDX-License-Identifier: Apache-2.0
"""Automatic device mapping (HybridFlow §6): what placements cost, the best, and its proof."""
