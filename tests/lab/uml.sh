#!/bin/sh
# The first process of a machine that is a kernel of its own: its files, its name, its network, the shared disk, sshd.
# uml.py starts it and writes the settings, in capitals. Where it fails the kernel panics, which uml.py sees.
set -e
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
machine=/run/machine # of the box: the root is still its root, through hostfs
. $machine/settings
mount -t proc proc /proc
for module in overlay nfsv3 nfsv4; do modprobe -d $machine $module; done

mount -t tmpfs layer /tmp
mkdir /tmp/upper /tmp/work /tmp/root
mount -t overlay -o lowerdir=/,upperdir=/tmp/upper,workdir=/tmp/work root /tmp/root
cd /tmp/root
mount -t proc proc proc
mount -t sysfs sys sys
for own in dev home mnt root run tmp var/tmp; do mount -t tmpfs -o mode=755 own $own; done
chmod 1777 tmp var/tmp
mkdir -p dev/pts dev/shm run/sshd ".$SHARED" "home/w-$NAME/.ssh"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    set -- $device
    mknod -m 666 "dev/$1" c "$2" "$3"
done
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
mount -t devpts -o ptmxmode=666 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
for seen in $SEEN; do
    mkdir -p ".$seen"
    mount -t hostfs -o "ro,$seen" seen ".$seen"
done

hostname "$NAME"
echo "$NAME" >etc/hostname
cp $machine/hosts etc/hosts
cp $machine/authorized_keys "home/w-$NAME/.ssh/"
cp $machine/host_key run/host_key
chmod 600 run/host_key "home/w-$NAME/.ssh/authorized_keys"
sed -i "s#^root:.*:0:0:.*#root:x:0:0:root:/home/w-$NAME:/bin/bash#; s#^root:!#root:*#" etc/passwd etc/shadow
mkdir run/box
pivot_root . run/box
umount -l /run/box

ip link set lo up
ip address add "$ADDRESS/24" dev vec0
ip link set vec0 up
case $OPTIONS in
    *vers=3*) # its locks need these two
        rpcbind -w
        rpc.statd --no-notify
        ;;
esac
mount -t nfs -o "$OPTIONS" "$SHARE" "$SHARED"
/usr/sbin/sshd -D -f /dev/null -h /run/host_key -E /run/sshd.log -o UsePAM=no -o PidFile=/run/sshd.pid \
    -o MaxStartups=200 -o MaxSessions=200 -o Subsystem="sftp internal-sftp" &
while :; do # orphans are collected by the first process
    wait
    sleep 1
done
