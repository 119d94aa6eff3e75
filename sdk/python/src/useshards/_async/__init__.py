"""The client for asyncio. The one for threads is generated from it."""
