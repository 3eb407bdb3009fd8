"""Who may read a run: loopback without a token, others only with it, and TLS where it is asked for."""

import datetime
import ipaddress
import logging
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from overlord.service.auth import Address, Listen, Tls
from tests.service.served import Raw, served, streams, two_sources, undisturbed

TOKEN = "a-token-that-is-hard-to-guess"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "overlord test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:5000", "trainer-7:5000"])
def test_off_loopback_a_service_does_not_start_without_a_token(address):
    with pytest.raises(
        ol.errors.SpecError, match=r"can be reached from other machines, so it needs a token.*or listen on 127"
    ):
        Listen(address)
    with ol.start(two_sources()) as loader, pytest.raises(ol.errors.SpecError, match="needs a token"):
        loader.serve(address)


def test_off_loopback_with_a_token_but_no_tls_is_allowed_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "overlord"):
        Listen("0.0.0.0:0", TOKEN)
    assert any("without TLS" in record.message for record in caplog.records)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "grpc://127.8.9.1:70"])
def test_loopback_needs_no_token(address):
    assert Listen(address).bound.is_loopback


def test_a_call_without_the_token_or_with_a_wrong_one_is_refused_and_logged(caplog):
    job = two_sources()
    with served(job, token=TOKEN) as (_, address), caplog.at_level(logging.WARNING, "overlord"):
        for token, what in ((None, "no token"), ("wrong", "a wrong token"), (TOKEN + "x", "a wrong token")):
            with pytest.raises(ol.errors.ServiceError, match=f"the call carried {what}; pass token="):
                ol.connect(address, rank=0, token=token, timeout_s=20)
            with pytest.raises(pa.ArrowException, match="requires its token"):
                Raw(address, token).get(b"")
        assert sum("refused a call" in record.message for record in caplog.records) == 6
        assert TOKEN not in caplog.text
        client = ol.connect(address, rank=0, token=TOKEN, timeout_s=20)
        assert streams([client], 3) == undisturbed(job, 3)


def test_a_token_never_shows_in_the_representation_of_where_a_service_listens():
    assert TOKEN not in repr(Listen(token=TOKEN))


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "schlüssel"])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(ol.errors.SpecError, match="a token is printable ASCII without spaces"):
        Listen(token=token)
    with pytest.raises(ol.errors.SpecError, match="a token is printable ASCII without spaces"):
        ol.connect("127.0.0.1:1", rank=0, token=token)


def test_tls_carries_the_same_stream_with_and_without_a_token(certificate):
    job = two_sources()
    for token in (None, TOKEN):
        with served(job, tls=certificate, token=token) as (_, address):
            assert address.startswith("grpc+tls://127.0.0.1:")
            client = ol.connect(address, rank=0, tls_root=certificate[0], token=token, timeout_s=20)
            assert streams([client], 3) == undisturbed(job, 3)


def test_an_address_without_a_scheme_means_tls_when_a_root_is_given(certificate):
    with served(two_sources(), tls=certificate) as (_, address):
        client = ol.connect(address.removeprefix("grpc+tls://"), rank=0, tls_root=certificate[0], timeout_s=20)
        assert next(client).number == 0


def test_a_certificate_that_the_client_does_not_trust_and_a_plain_client_are_refused(certificate):
    with served(two_sources(), tls=certificate) as (_, address):
        for told in (address, address.replace("grpc+tls", "grpc")):
            with pytest.raises(ol.errors.ServiceError, match="could not reach the service"):
                ol.connect(told, rank=0, timeout_s=0.5)


def test_a_missing_certificate_file_is_said(tmp_path):
    with (
        ol.start(two_sources()) as loader,
        pytest.raises(ol.errors.SpecError, match="the TLS certificate cannot be read from"),
    ):
        loader.serve(tls=(tmp_path / "no.pem", tmp_path / "no.key"))


@pytest.mark.parametrize("text", ["", "nowhere", "host:port", "http://host:1", "host:99999999", "grpc://h:1/path", ":5"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(ol.errors.SpecError, match="an address is host:port, grpc://host:port or grpc"):
        Address.parse(text)


def test_tls_asked_for_in_the_address_needs_its_files():
    with pytest.raises(ol.errors.SpecError, match="needs TLS files: pass tls="):
        Listen("grpc+tls://127.0.0.1:0")
    assert str(Listen("127.0.0.1:80", tls=Tls("a", "b")).bound) == "grpc+tls://127.0.0.1:80"


def test_clients_are_told_a_host_that_they_can_reach():
    assert Listen("127.0.0.1:0").public_address(5) == "grpc://127.0.0.1:5"
    assert Listen("0.0.0.0:0", TOKEN, advertise="node-3").public_address(5) == "grpc://node-3:5"
    assert Listen("[::1]:0").public_address(5) == "grpc://[::1]:5"
    assert Listen("0.0.0.0:0", TOKEN, reached_from="127.0.0.1").public_address(5) == "grpc://127.0.0.1:5"
    assert "0.0.0.0" not in Listen("0.0.0.0:0", TOKEN).public_address(5)
