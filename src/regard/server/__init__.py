"""The HTTP server: OpenAI's API, routes for inspecting a model, and the web page.

`app.create_app` wires the routes and `run.serve` binds a port. The engine is synchronous and runs in one thread
(`async_engine`); everything else is asyncio.
"""
