# SPDX-License-Identifier: Apache-2.0
"""What is learned: one dataflow program an algorithm."""
