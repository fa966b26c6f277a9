"""The HTTP server: OpenAI's API, routes for inspecting a model, and the web page.

`app.create_app` connects the routes and `run_server.serve` binds a port. The engine is synchronous and runs in one
thread (`engine.async_engine`); everything else is asyncio.
"""
