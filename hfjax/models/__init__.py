# SPDX-License-Identifier: Apache-2.0
"""Model definitions and their Hugging Face files."""
