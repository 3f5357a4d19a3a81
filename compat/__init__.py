# SPDX-License-Identifier: Apache-2.0
"""What was written for other systems, each in a room; `edl.integrations` has the table of them.

Nothing else imports these modules, so the rest works without this folder.
"""
