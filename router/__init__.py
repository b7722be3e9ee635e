"""The front door: text in, a stream of text out.

A request is validated (``validate``), templated and tokenised, classified (``task_type``), given a decode plan with its
reason (``plan``), decoded on a verify replica (``replicas``, ``decode``) whose tokens are journalled (``journal``), turned
into text and cut at stops (``text``), counted (``tally``) and remembered (``recent``). ``generation`` is one request from
arrival to its one answer, ``service`` the gRPC surface. Nothing here imports torch; no round ever waits for the router.
"""
