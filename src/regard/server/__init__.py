"""The HTTP service: OpenAI's API, the routes that look inside a model, and the page.

`app.create_app` wires the routes, `run.serve` binds a port. The engine is synchronous and lives in one thread
(`worker`); everything else is asyncio. Imports: engine, text and lens below; nothing here is imported by them.
"""
