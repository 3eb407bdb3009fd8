"""`overlord prepare`: writes the rows of a job's sources after their transforms, so that later runs need not make them."""
