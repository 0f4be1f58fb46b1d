# The first process of a machine: its disk, its name, its network once it is plugged in, its sshd. machines.py starts it
# in namespaces of its own and sets the capitals; when the other end of standard input closes, the whole machine ends.
set -e
umask 022
read -r pid _ </proc/self/stat
echo "$pid" # its number outside, whose /proc this still is

hostname "$NAME"
disk=$FOLDER/disks/$NAME
cd "$disk" # relative paths, since those of overlays must not hold commas or colons
mkdir -p root private
for at in $LAYERS; do
    layer=${at//\//_}
    mkdir -p "upper/$layer" "work/$layer"
    mount -t overlay -o "lowerdir=$at,upperdir=upper/$layer,workdir=work/$layer" "$NAME" "root$at"
done

cd root
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs -o size=64m shm dev/shm
mount -t tmpfs -o size=16m run run
mkdir -p ".$SHARED" ".$SHARED_AT" run/old run/sshd "home/w-$NAME/.ssh"
[ "$SHARED_AT" = "$SHARED" ] || mount --bind "$disk/private" ".$SHARED"
[ "$SHARED_AT" = / ] || mount --bind "$SHARED" ".$SHARED_AT"
cat /proc/sys/kernel/random/uuid >run/boot_id
mount --bind run/boot_id proc/sys/kernel/random/boot_id # the kernel has one for all machines

cp "$FOLDER/hosts" etc/hosts
echo "$NAME" >etc/hostname
sed -i "s#^root:.*:0:0:.*#root:x:0:0:root:/home/w-$NAME:/bin/bash#; s#^root:!*#root:#" etc/passwd etc/shadow
cp "$FOLDER/home/.ssh/id_ed25519.pub" "home/w-$NAME/.ssh/authorized_keys"
cp "$FOLDER/keys/$NAME" run/host_key
cat >run/sshd_config <<END
ListenAddress $ADDRESS
HostKey /run/host_key
PidFile /run/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
MaxStartups 200
MaxSessions 200
Subsystem sftp internal-sftp
END
cat >run/serve <<END
set -e
# Newer ones keep away for a while whoever failed to log in, older ones do not know how to be told.
$SSHD -f /run/sshd_config -o PerSourcePenalties=no 2>/dev/null || $SSHD -f /run/sshd_config
until (: </dev/tcp/$ADDRESS/22) 2>/dev/null; do sleep 0.01; done
END
pivot_root . run/old
umount -l /run/old

read -r # the network is plugged in
bash /run/serve
echo up
while read -r; do :; done
