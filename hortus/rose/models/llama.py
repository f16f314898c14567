"""Llama and Mistral: Qwen3's trunk without norms on q and k (Touvron et al., arXiv 2302.13971; Jiang et al., arXiv 2310.06825).

Mistral may see only the last sliding_window tokens. All differences are data, so this file only names the family.
"""

from __future__ import annotations

import dataclasses

from hortus.rose.models import qwen3

FAMILY = dataclasses.replace(qwen3.FAMILY, refused_dtypes=())
