# SPDX-License-Identifier: Apache-2.0
"""What a trained model is handed over as: its formats, and the proof that they hold what was trained."""
