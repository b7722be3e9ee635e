"""Everything that knows every service: placement under Ray, the command line and the demonstration.

``launch.running_cluster`` is the one place that starts anything; ``cli`` is what users type; ``demo`` is what
``make run`` shows.
"""
