# SPDX-License-Identifier: Apache-2.0
"""Automatic device mapping (HybridFlow §6): what a placement costs, which is best, and its proof."""
