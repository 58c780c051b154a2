"""`starling agent`: one node of a group. Supervises the engine, hosts the endpoint and reports to the operator."""
