#!/bin/sh
# The guest's first process. It stands on the host's own root directory, read-only; it lays the
# lab's programs over that, and memory over both, so that every write vanishes with the guest.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
echo "lab: the kernel is up"
mount -t proc proc /proc
for word in $(cat /proc/cmdline); do
  case $word in
    parts=*) parts=${word#parts=} ;;
    job=*) job=${word#job=} ;;
  esac
done
modules=$(echo "$parts"/uml/usr/lib/uml/modules/"$(uname -r)")

mount -t tmpfs -o size=75% tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root /mnt/parts
root=/mnt/root
mount -t hostfs none /mnt/parts -o "$parts/root"
LD_LIBRARY_PATH=/mnt/parts/usr/lib/x86_64-linux-gnu PATH=/mnt/parts/usr/sbin:$PATH \
  insmod "$modules/kernel/fs/overlayfs/overlay.ko"
mount -t overlay overlay $root \
  -o lowerdir=/mnt/parts:/,upperdir=/mnt/upper,workdir=/mnt/work,xino=off

mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t devtmpfs dev $root/dev
mkdir -p $root/dev/shm $root/dev/pts $root/lab $root/lib/modules
mount -t tmpfs tmpfs $root/dev/shm
mount -t devpts devpts $root/dev/pts
mount -t tmpfs tmpfs $root/run
mount -t hostfs none $root/lab -o "$job"
ln -s "$modules" "$root/lib/modules/$(uname -r)"
exec chroot $root /bin/sh /lab/init_nfs.sh
