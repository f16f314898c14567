"""Ask a scheduler's grpc.health.v1 over TLS; exit status 0 when it serves. The kubelet's own gRPC probe speaks no TLS.

Arguments: ADDRESS, the NAME its certificate is for, SERVICE ("" for the server as a whole), the FOLDER of the certificates.
"""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

address, name, service, folder = sys.argv[1:]
ca, key, cert = (Path(folder, file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
options = [("grpc.ssl_target_name_override", name)]
with grpc.secure_channel(address, credentials, options=options) as channel:
    try:
        asked = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=6, wait_for_ready=True)
    except grpc.RpcError as e:
        sys.exit(f"{address}: {e.code().name}: {e.details()}")
if answer.status != health_pb2.HealthCheckResponse.SERVING:
    sys.exit(f"{address}: not serving")
