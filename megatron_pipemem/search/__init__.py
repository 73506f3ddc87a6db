"""The search for the fastest schedule under a memory cap with given costs. It loads numpy only if it needs it."""

from megatron_pipemem.search.result import Candidate, SearchResult
from megatron_pipemem.search.search import MAX_CHUNKS, search_schedule

__all__ = ["MAX_CHUNKS", "Candidate", "SearchResult", "search_schedule"]
