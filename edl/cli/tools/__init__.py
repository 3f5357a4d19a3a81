# SPDX-License-Identifier: Apache-2.0
"""Commands beside a job: models, data, images, plans, reports, rehearsals."""
