# SPDX-License-Identifier: Apache-2.0
"""Jobs of a cluster: releases of the chart, through the API of Kubernetes."""
