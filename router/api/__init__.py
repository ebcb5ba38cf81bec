"""The OpenAI API over HTTP: from a request's bytes to a tokenized prompt, and from a replica's chunks to an answer.

    bytes ──parsing──▶ protocol ──prompts──▶ PromptBlocks ──generations──▶ chunks ──streams──▶ bytes
                                             tenants        replica_client

`app` joins these into a FastAPI application. All of it is plain asyncio, apart from `gateway`, which adapts it to Ray
Serve.
"""
