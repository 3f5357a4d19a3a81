# SPDX-License-Identifier: Apache-2.0
"""The ring as the trainer sees it (`base`), and the engines that can be one."""
