ssh -o BatchMode=yes -o ConnectTimeout=15 -- n0 'umask 077 && mkdir -p longhaul/base-1b-12345678 && cat >longhaul/base-1b-12345678/run.sh.new && mv -f longhaul/base-1b-12345678/run.sh.new longhaul/base-1b-12345678/run.sh' <run.sh
ssh -o BatchMode=yes -o ConnectTimeout=15 -- n0 'bash longhaul/base-1b-12345678/run.sh start 0 8 16 n0 28176'
ssh -o BatchMode=yes -o ConnectTimeout=15 -- me@n1 'umask 077 && mkdir -p longhaul/base-1b-12345678 && cat >longhaul/base-1b-12345678/run.sh.new && mv -f longhaul/base-1b-12345678/run.sh.new longhaul/base-1b-12345678/run.sh' <run.sh
ssh -o BatchMode=yes -o ConnectTimeout=15 -- me@n1 'bash longhaul/base-1b-12345678/run.sh start 8 8 16 n0 28176'
