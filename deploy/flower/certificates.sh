#!/bin/sh
# Certificates of a test federation: a new certificate authority, and a certificate of a SuperLink for its names and
# addresses.
#   certificates.sh FOLDER [NAME or ADDRESS]...
# localhost and 127.0.0.1 are always among them: the SuperLink's own processes reach it there. Valid for a year.
# Give ca.crt to every SuperNode and to everyone who runs `flwr run`; ca.key and superlink.key to nobody.
set -eu
umask 077
folder=${1:?usage: certificates.sh FOLDER [NAME or ADDRESS]...}
shift
names=DNS:localhost,IP:127.0.0.1
for name; do
    case $name in
        *[!0-9.]*) names=$names,DNS:$name ;;
        *) names=$names,IP:$name ;;
    esac
done
mkdir -p "$folder"
cd "$folder"
if [ -e superlink.key ]; then
    echo "$folder/superlink.key: exists already; name another folder, or remove it first" >&2
    exit 2
fi

printf '[req]\ndistinguished_name = name\n[name]\n' >empty.cnf # without it, openssl adds values of its default file
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out ca.key
openssl req -config empty.cnf -x509 -new -key ca.key -out ca.crt -days 365 -subj "/CN=Authority of a test federation" \
    -addext basicConstraints=critical,CA:TRUE,pathlen:0 -addext keyUsage=critical,keyCertSign,cRLSign \
    -addext subjectKeyIdentifier=hash
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out superlink.key
openssl req -config empty.cnf -x509 -new -key superlink.key -CA ca.crt -CAkey ca.key -out superlink.crt -days 365 \
    -subj "/CN=SuperLink" -addext "subjectAltName=$names" -addext basicConstraints=critical,CA:FALSE \
    -addext keyUsage=critical,digitalSignature -addext extendedKeyUsage=serverAuth \
    -addext authorityKeyIdentifier=keyid
rm empty.cnf
chmod 644 ca.crt superlink.crt
