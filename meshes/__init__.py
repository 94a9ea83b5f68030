# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie: device meshes, layouts and placements."""
