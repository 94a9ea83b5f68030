# SPDX-License-Identifier: Apache-2.0
"""The single controller: pools of processes, protocols, role handles."""
