"""Word lists of the generated tasks, English and Chinese. Every list holds each word once."""

# ruff: noqa: E501, SIM905 - word lists read and change best as one text

from __future__ import annotations

ADJECTIVES = (
    "amber ancient azure bitter blue bold brass brave bright broken bronze calm clever cold copper coral crimson "
    "dark deep distant dry dusty early eager empty faint fierce final frozen gentle golden green hidden hollow "
    "humble icy iron ivory jolly keen late light little lonely lucky marble mellow misty narrow noble olive pale "
    "patient plain proud purple quiet rapid red rough round royal rusty salty scarlet sharp silent silver simple "
    "sleepy slow smooth solid steep stone subtle sunny swift tall tame tiny vivid warm white wild windy wise "
    "wooden yellow young"
).split()  # fmt: skip
NOUNS = (
    "acorn anchor apple arrow badger balloon banjo barrel basket beacon beaver bell bicycle blanket boat bottle "
    "bridge broom bucket button cabin camel candle canoe castle cedar cherry chimney circle clock cloud comet "
    "compass cradle crane crown dagger dolphin donkey drum eagle engine falcon feather fiddle fountain fox garden "
    "gate goose guitar hammer harbor hazel hedge heron island jacket jaguar kettle kite ladder lantern lemon lion "
    "lizard lobster magnet maple meadow mirror mountain needle oak orchid otter owl oyster paddle panther parrot "
    "pebble pencil pepper piano pigeon pillow planet pony rabbit raven ribbon river robin rocket saddle salmon "
    "scarf shovel sparrow spider spoon squirrel statue table teapot thistle tiger tower tractor trumpet tulip "
    "turtle umbrella valley violin wagon walnut whale willow window wolf"
).split()  # fmt: skip
FIRST_NAMES = (
    "Ada Anton Bela Clara Dario Elena Felix Greta Hugo Ines Jonas Karin Leo Mara Nils Olga Pavel Rosa Simon Tilda "
    "Ulrich Vera Walter Yara"
).split()  # fmt: skip
LAST_NAMES = (
    "Abel Brandt Costa Dorn Engel Faber Grohl Holm Ivers Jansen Keller Lind Moreau Novak Orloff Petri Quist Rossi "
    "Stern Torres Unger Vogel Weiss Zeller"
).split()  # fmt: skip

# Parts of filler sentences.
SUBJECTS = (
    "The baker;The captain;The carpenter;The farmer;The fisher;The gardener;The guard;The judge;The miller;"
    "The painter;The pilot;The porter;The sailor;The shepherd;The singer;The smith;The tailor;The teacher;"
    "A child;A doctor;A merchant;A neighbor;A student;A traveler;An old man;An old woman;The clerk;The cook"
).split(";")  # fmt: skip
VERBS = (
    "carried;cleaned;counted;dropped;found;kept;lost;mended;moved;needed;noticed;opened;painted;sold;showed;took;"
    "wanted;watched;wrote about;asked about;talked about;walked past;waited for;thought of"
).split(";")  # fmt: skip
OBJECTS = (
    "the letters;the tools;the chairs;a loaf of bread;the old map;the tickets;a heavy box;the news;the horses;"
    "the carts;some paper;a few coins;the keys;the coats;the lamps;the ropes;a small book;the fence;the roof;"
    "the road;the market;the church;the school;the weather;the harvest;the ships;the stairs;the papers"
).split(";")  # fmt: skip
ENDINGS = (
    "in the morning;in the evening;after lunch;before the rain;during the night;near the station;by the shore;"
    "at the corner;behind the mill;under the trees;on the way home;with great care;without a word;for a while;"
    "once more;as usual;in spring;in autumn;on Monday;on Friday;at noon;when the wind turned"
).split(";")  # fmt: skip

# A place and a thing that everyone knows to be there: a question names one, the fact the other.
LANDMARKS = (
    ("the Eiffel Tower", "Paris"), ("the Colosseum", "Rome"), ("the Brandenburg Gate", "Berlin"),
    ("Big Ben", "London"), ("the Acropolis", "Athens"), ("the Kremlin", "Moscow"), ("the Prado", "Madrid"),
    ("the Little Mermaid", "Copenhagen"), ("the Blue Mosque", "Istanbul"), ("the Great Sphinx", "Cairo"),
    ("the Burj Khalifa", "Dubai"), ("the Space Needle", "Seattle"), ("the Opera House", "Sydney"),
    ("the Forbidden City", "Beijing"), ("the Taj Mahal", "Agra"), ("the Charles Bridge", "Prague"),
)  # fmt: skip

ZH_ADJECTIVES = (
    "琥珀 古老 蓝色 勇敢 明亮 青铜 安静 聪明 寒冷 红色 黑色 深海 遥远 空心 金色 绿色 隐藏 钢铁 象牙 孤独 幸运 白色 高大 "
    "紫色 快速 生锈 银色 温暖 木质 年轻"
).split()  # fmt: skip
ZH_NOUNS = (
    "猎鹰 水獭 灯塔 风筝 铁锚 苹果 弓箭 气球 篮子 小船 大桥 水桶 骆驼 蜡烛 城堡 雪松 樱桃 时钟 流星 王冠 海豚 毛驴 花园 "
    "吉他 锤子 岛屿 茶壶 梯子 柠檬 狮子 镜子 铅笔 钢琴 河流 火箭 麻雀 雕像 老虎 乌龟 雨伞"
).split()  # fmt: skip
ZH_NAMES = "王明 李华 张伟 刘洋 陈静 杨帆 赵磊 黄丽 周杰 吴敏 徐强 孙红 马超 朱琳 胡军 郭芳".split()
ZH_SUBJECTS = "面包师 船长 木匠 农夫 园丁 警卫 法官 画家 歌手 老师 学生 医生 商人 邻居 老人 孩子".split()
ZH_VERBS = "看见了 找到了 丢了 修好了 卖掉了 带走了 谈到了 想起了 打开了 数过了 需要 等着".split()
ZH_OBJECTS = "信件 工具 椅子 面包 旧地图 车票 重箱子 新闻 马车 几张纸 硬币 钥匙 大衣 油灯 绳子 小书".split()
ZH_TIMES = "早上 晚上 午后 下雨前 夜里 春天 秋天 星期一 中午 过了一会儿 像往常一样 回家的路上".split()
ZH_LANDMARKS = (
    ("埃菲尔铁塔", "巴黎"), ("斗兽场", "罗马"), ("大本钟", "伦敦"), ("红场", "莫斯科"), ("故宫", "北京"),
    ("东方明珠", "上海"), ("兵马俑", "西安"), ("西湖", "杭州"),
)  # fmt: skip
