# SPDX-License-Identifier: Apache-2.0
"""What runs inside one SPMD program: decoding, scoring, updates, relay, checkpoints."""
