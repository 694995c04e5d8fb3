#!/bin/sh
# Makes the server and its clients, then runs the scenarios. What the lab's own folder on the host
# holds is in /lab; settings.sh names CLIENTS, VERSIONS, EXPORT_MB, PYTHON, and PYTHONPATH.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
export DM_DISABLE_UDEV=1 # there is no udev to wait for
. /lab/settings.sh
dmesg -n 1
hostname server
modprobe -a veth nfsd nfsv3 nfsv4 loop dm-mod dm-flakey sch_netem

fail() {
  echo "lab: $*"
  dmesg | tail -n 20
  halt_now
}

halt_now() {
  echo o > /proc/sysrq-trigger
  sleep 60
}

# Each client is a network namespace of its own, which the kernel's NFS client takes for a machine
# of its own: own connections, own caches. Its line ends on the server in vNAME.
make_client() { # NAME NUMBER
  ip -batch - << END
netns add $1
link add v$1 type veth peer name eth0 netns $1
address add 10.77.$2.1/24 dev v$1
link set v$1 up
END
  ip -n "$1" -batch - << END
address add 10.77.$2.2/24 dev eth0
link set eth0 up
link set lo up
END
}

# The export lies on ext4, on a device that can be told to lose writes, on a file in memory.
make_export() {
  mkdir -p /run/disk /export
  mount -t tmpfs -o size=90% tmpfs /run/disk
  truncate -s "${EXPORT_MB}M" /run/disk/image
  disk=$(losetup --find --show /run/disk/image)
  dmsetup create export --table "0 $(blockdev --getsz "$disk") linear $disk 0"
  mkfs.ext4 -q -m 0 -E lazy_itable_init=0,lazy_journal_init=0 /dev/mapper/export
  mount /dev/mapper/export /export || fail "the export cannot be mounted"
}

start_server() {
  mkdir -p /run/rpcbind /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/nfsdcltrack
  touch /var/lib/nfs/etab /var/lib/nfs/rmtab
  grep -q ^_rpc: /etc/passwd || echo "_rpc:x:119:65534::/run/rpcbind:/bin/false" >> /etc/passwd
  mount -t nfsd nfsd /proc/fs/nfsd
  mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
  echo "/export 10.77.0.0/16(rw,sync,no_root_squash,no_subtree_check,fsid=0)" > /etc/exports
  rpcbind -w
  exportfs -ra
  rpc.nfsd --grace-time 10 --lease-time 10 8
  rpc.mountd
  echo Y > /proc/fs/nfsd/v4_end_grace # nobody was connected before
}

mount_client() { # NAME NUMBER
  commands="hostname $1"
  for version in $VERSIONS; do
    options=retry=0,hard,vers=$version
    from="10.77.$2.1:/"
    if [ "$version" = 3 ]; then options=$options,nolock from=${from}export; fi
    commands="$commands && mkdir -p /nfs/$version/$1"
    commands="$commands && mount -t nfs -o $options $from /nfs/$version/$1"
  done
  unshare --uts nsenter --net="/run/netns/$1" sh -c "$commands" || fail "$1 cannot mount"
}

for_each_client() { # COMMAND
  number=1
  for client in $CLIENTS; do
    "$1" "$client" $number
    number=$((number + 1))
  done
}

ip link set lo up
for_each_client make_client
make_export
start_server
for_each_client mount_client
# Of what imports make, hardly anything is garbage: to look for it would take seconds.
"$PYTHON" -c "import gc; gc.disable(); from tests.lab import guest; guest.main()" < /dev/null || echo "lab: the guest's runner ended with $?"
halt_now
