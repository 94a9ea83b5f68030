# SPDX-License-Identifier: Apache-2.0
"""How fast and how exact: each benchmark is a command that prints one table."""
